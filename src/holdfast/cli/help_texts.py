"""The help of the command line: what it is, and for each command what it does and how it is called."""

from typing import NamedTuple

__all__ = ["ABOUT", "COMMANDS", "EPILOG", "CommandHelp"]

ABOUT = """\
Look into checkpoints and check them: those of holdfast, of torch.distributed.checkpoint, of
safetensors, and files of torch.save. Looking needs no model, and changes nothing. Only files of torch.save
need torch.
"""

EPILOG = """\
exit codes:
  0  fine
  1  the checkpoint is damaged, or differs from the other one
  2  the command was used wrongly, or it refuses
  3  there is no checkpoint, or it cannot be read

`holdfast COMMAND --help` explains a command.
"""


class CommandHelp(NamedTuple):
    """The help of a command.

    Attributes:
        summary: In the list of commands.
        about: In its own help, above the arguments.
        examples: Below them.
    """

    summary: str
    about: str
    examples: str = ""


COMMANDS = {
    "ls": CommandHelp(
        "list tensors and objects",
        """\
List what a checkpoint holds: every tensor with dtype, shape and size, and in how many chunks it was
saved if there are several. Values that are not tensors are shown as objects, small ones with their value.
Of the folder of a run, list the steps: when each was saved, its size, and whether it is complete.

A GLOB picks keys by their flat name, with *, ? and [...], upper and lower case apart; * also matches
dots. Put it in quotes, otherwise the shell expands it. A word that is an existing path, or a URL, is another
checkpoint to list.
""",
        """\
examples:
  holdfast ls run/step-1000
  holdfast ls run/step-1000 'model.layers.0.*' '*.bias'
  holdfast ls run/step-1000 --depth 2          how the bytes are spread
  holdfast ls run/step-1000 --flat --sort size the largest first, one line per key
  holdfast ls run                              the steps of a run
  holdfast ls run/step-1000 --json | jq '.tensors[].key'
""",
    ),
    "show": CommandHelp(
        "what made it, when, how large, which files",
        """\
Tell what a checkpoint is: what made it and when, by how many ranks, in which format, whether torch can
read it, its totals by dtype, and its files. Sizes of files are compared with the recorded ones, and
nothing else is: `holdfast verify` reads every byte.
""",
    ),
    "verify": CommandHelp(
        "check every byte",
        """\
Read every byte of a checkpoint and compare it with the recorded checksums. All damage is named, with
file, key and place, not only the first. What torch wrote has weaker checksums; what could not be
checked of it is said at the end.
""",
        """\
examples:
  holdfast verify run/step-1000
  holdfast verify run/*
  holdfast verify -q run/step-1000 || echo 'do not resume from this one'
  holdfast verify run/step-1000 --json | jq '.damage[].keys[]'
""",
    ),
    "trace": CommandHelp(
        "how long the save took, and where",
        """\
Tell what the save of a checkpoint did: for each phase how long it took, on which rank it took longest,
and how long ranks waited for others. With -o, also write it as a trace for Perfetto (ui.perfetto.dev) and
chrome://tracing, with one row for each rank. The commit itself is not in it.
""",
        """\
examples:
  holdfast trace run/step-1000
  holdfast trace run/step-1000 -o trace.json
  holdfast trace run/step-1000 --json | jq '.record.slowest'
""",
    ),
    "report": CommandHelp(
        "draw it as an HTML page",
        """\
Draw a checkpoint as one HTML page: its size by module, which rank wrote which part of which tensor, dtypes,
how even files and ranks are, how the save went, and whether it is sound. The page needs no network and can
be sent to others. If PATH has no checkpoint but steps of a run, the page shows the run: sizes, durations and
metrics of the steps, what is kept and why.
""",
        """\
examples:
  holdfast report run/step-1000
  holdfast report run/step-1000 -o step-1000.html --verify
  holdfast report s3://bucket/run/step-1000 -o step-1000.html
  holdfast report run --last 3 --best 1 --metric loss
""",
    ),
    "cp": CommandHelp(
        "copy it to another place, checked",
        """\
Copy a checkpoint to another place: a folder or a URL. Files are copied as they are. The copy is read back
and every byte is compared with the recorded checksums. Only then it becomes a checkpoint, in one step: a
checkpoint that was there before stays whole until then.
""",
        """\
examples:
  holdfast cp run/step-1000 s3://bucket/run/step-1000
  holdfast cp s3://bucket/run/step-1000 /scratch/step-1000 --overwrite
""",
    ),
    "convert": CommandHelp(
        "into another format, checked",
        """\
Convert a checkpoint into another format: holdfast (which torch reads, too), torch_save (one file, which
torch.load reads), or safetensors. PATH is a checkpoint, a file of torch.save, or a folder or file of
safetensors; which of them is found out. Nothing that it names is run. The target is read back and compared.
What was there before stays whole until the new one is complete.
""",
        """\
examples:
  holdfast convert run/step-1000 model.pt
  holdfast convert model.pt run/step-0 --to holdfast
  holdfast convert run/step-1000 export --to safetensors --keys model --rename model= --dtype bfloat16
  holdfast convert s3://bucket/run/step-1000 s3://bucket/export --to safetensors --keys 'model.*'
""",
    ),
    "diff": CommandHelp(
        "compare it with another one",
        """\
Compare two checkpoints: keys, shapes, dtypes and values. Values with equal checksums are equal and are not
read. Of all others the size of the difference is told, for which torch is needed.
""",
        """\
examples:
  holdfast diff run/step-1000 run/step-2000
  holdfast diff run/step-1000 s3://bucket/run/step-1000 -q && echo equal
  holdfast diff run/step-1000 run/step-2000 --json | jq '.values[].key'
""",
    ),
    "bench": CommandHelp(
        "how fast a storage is",
        """\
Measure how fast a folder or URL takes and gives checkpoints: durable saves, loads from the disk and loads
from memory, each beside stock torch, and whether other settings than the defaults would be faster. Needs
torch. All that is written is removed again.
""",
        """\
examples:
  holdfast bench /mnt/checkpoints
  holdfast bench /mnt/checkpoints --size 8GiB --rounds 5
  holdfast bench s3://bucket/somewhere
""",
    ),
    "steps": CommandHelp(
        "the steps of a run",
        """\
List the steps of a run, the newest last: the checkpoints in the folders of ROOT, whoever wrote them. Only
the root is looked at, and no file of a checkpoint is read unless you ask for metrics.
""",
        """\
examples:
  holdfast steps run
  holdfast steps s3://bucket/run --metrics
  holdfast steps run --json | jq '.steps[] | select(.state == "complete") | .step'
""",
    ),
    "prune": CommandHelp(
        "delete steps of a run",
        """\
Delete the steps of a run that none of the options keeps. Never deleted are the newest step that is whole,
pinned steps, and what is not complete or known to be damaged. Deletions that were cut off are finished.
""",
        """\
examples:
  holdfast prune run --last 3 --every 1000 --dry-run
  holdfast prune s3://bucket/run --last 2 --best 3 --metric loss
""",
    ),
    "clean": CommandHelp(
        "remove what killed saves left",
        """\
Remove what killed saves have left in a checkpoint's folder, or in all folders of a run, and finish deletions
that were cut off. Only files go that a lease shows to be a dead save's. Needs torch.
""",
        """\
examples:
  holdfast clean run
  holdfast clean run/step-1000 --dry-run
""",
    ),
    "run": CommandHelp(
        "run a program on holdfast, unchanged",
        """\
Run a command, such as torchrun, with HOLDFAST_INSTALL=1: every Python process that it starts in this
environment saves and loads with holdfast where it calls torch.distributed.checkpoint, unchanged.
""",
        """\
examples:
  holdfast run torchrun --nproc-per-node 8 train.py --lr 3e-4
  holdfast run python train.py
""",
    ),
    "completion": CommandHelp(
        "completion of words by the shell",
        """\
Print a script by which a shell completes the commands and options of holdfast.
""",
        """\
examples:
  holdfast completion bash > ~/.local/share/bash-completion/completions/holdfast
  holdfast completion zsh > "${fpath[1]}/_holdfast"
""",
    ),
}
"""The help of each command, in the order in which they are listed."""
