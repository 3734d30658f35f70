"""The words that the commands understand, and the help that explains them."""

import argparse

from holdfast._version import __version__

__all__ = ["make_parser"]

_ABOUT = """\
Look into checkpoints and check them: those of holdfast, of torch.distributed.checkpoint, of
safetensors, and files of torch.save. Looking needs no model, and changes nothing. Only files of torch.save
need torch.
"""

_EPILOG = """\
exit codes:
  0  fine
  1  the checkpoint is damaged, or differs from the other one
  2  the command was used wrongly
  3  there is no checkpoint, or it cannot be read

`holdfast COMMAND --help` explains a command.
"""

_PATH_HELP = "the checkpoint: a folder or a file, as a path or URL"

_LS = """\
List what a checkpoint holds: every tensor with dtype, shape and size, and in how many chunks it was
saved if there are several. Values that are not tensors are shown as objects, small ones with their value.
Of the folder of a run, list the steps: when each was saved, its size, and whether it is complete.

A GLOB picks keys by their flat name, with *, ? and [...], upper and lower case apart; * also matches
dots. Put it in quotes, otherwise the shell expands it. A word that is an existing path, or a URL, is another
checkpoint to list.
"""

_LS_EXAMPLES = """\
examples:
  holdfast ls run/step-1000
  holdfast ls run/step-1000 'model.layers.0.*' '*.bias'
  holdfast ls run/step-1000 --depth 2          how the bytes are spread
  holdfast ls run/step-1000 --flat --sort size the largest first, one line per key
  holdfast ls run                              the steps of a run
  holdfast ls run/step-1000 --json | jq '.tensors[].key'
"""

_SHOW = """\
Tell what a checkpoint is: what made it and when, by how many ranks, in which format, whether torch can
read it, its totals by dtype, and its files. Sizes of files are compared with the recorded ones, and
nothing else is: `holdfast verify` reads every byte.
"""

_VERIFY = """\
Read every byte of a checkpoint and compare it with the recorded checksums. All damage is named, with
file, key and place, not only the first. What torch wrote has weaker checksums; what could not be
checked of it is said at the end.
"""

_VERIFY_EXAMPLES = """\
examples:
  holdfast verify run/step-1000
  holdfast verify run/*
  holdfast verify -q run/step-1000 || echo 'do not resume from this one'
  holdfast verify run/step-1000 --json | jq '.damage[].keys[]'
"""


_TRACE = """\
Tell what the save of a checkpoint did: for each phase how long it took, on which rank it took longest,
and how long ranks waited for others. With -o, also write it as a trace for Perfetto (ui.perfetto.dev) and
chrome://tracing, with one row for each rank. The commit itself is not in it.
"""

_TRACE_EXAMPLES = """\
examples:
  holdfast trace run/step-1000
  holdfast trace run/step-1000 -o trace.json
  holdfast trace run/step-1000 --json | jq '.record.slowest'
"""


_REPORT = """\
Draw a checkpoint as one HTML page: its size by module, which rank wrote which part of which tensor, dtypes,
how even files and ranks are, how the save went, and whether it is sound. The page needs no network and can
be sent to others. If PATH has no checkpoint but steps of a run, the page shows the run: sizes, durations and
metrics of the steps, what is kept and why.
"""

_REPORT_EXAMPLES = """\
examples:
  holdfast report run/step-1000
  holdfast report run/step-1000 -o step-1000.html --verify
  holdfast report s3://bucket/run/step-1000 -o step-1000.html
  holdfast report run --last 3 --best 1 --metric loss
"""


_CP = """\
Copy a checkpoint to another place: a folder or a URL. Files are copied as they are. The copy is read back
and every byte is compared with the recorded checksums. Only then it becomes a checkpoint, in one step: a
checkpoint that was there before stays whole until then.
"""

_CP_EXAMPLES = """\
examples:
  holdfast cp run/step-1000 s3://bucket/run/step-1000
  holdfast cp s3://bucket/run/step-1000 /scratch/step-1000 --overwrite
"""

_CONVERT = """\
Convert a checkpoint into another format: holdfast (which torch reads, too), torch_save (one file, which
torch.load reads), or safetensors. PATH is a checkpoint, a file of torch.save, or a folder or file of
safetensors; which of them is found out. Nothing that it names is run. The target is read back and compared.
What was there before stays whole until the new one is complete.
"""

_CONVERT_EXAMPLES = """\
examples:
  holdfast convert run/step-1000 model.pt
  holdfast convert model.pt run/step-0 --to holdfast
  holdfast convert run/step-1000 export --to safetensors --keys model --rename model= --dtype bfloat16
  holdfast convert s3://bucket/run/step-1000 s3://bucket/export --to safetensors --keys 'model.*'
"""

_DIFF = """\
Compare two checkpoints: keys, shapes, dtypes and values. Values with equal checksums are equal and are not
read. Of all others the size of the difference is told, for which torch is needed.
"""

_DIFF_EXAMPLES = """\
examples:
  holdfast diff run/step-1000 run/step-2000
  holdfast diff run/step-1000 s3://bucket/run/step-1000 -q && echo equal
  holdfast diff run/step-1000 run/step-2000 --json | jq '.values[].key'
"""

_BENCH = """\
Measure how fast a folder or URL takes and gives checkpoints: durable saves, loads from the disk and loads
from memory, each beside stock torch, and whether other settings than the defaults would be faster. Needs
torch. All that is written is removed again.
"""

_BENCH_EXAMPLES = """\
examples:
  holdfast bench /mnt/checkpoints
  holdfast bench /mnt/checkpoints --size 8GiB --rounds 5
  holdfast bench s3://bucket/somewhere
"""


_STEPS = """\
List the steps of a run, the newest last: the checkpoints in the folders of ROOT, whoever wrote them. Only
the root is looked at, and no file of a checkpoint is read unless you ask for metrics.
"""

_STEPS_EXAMPLES = """\
examples:
  holdfast steps run
  holdfast steps s3://bucket/run --metrics
  holdfast steps run --json | jq '.steps[] | select(.state == "complete") | .step'
"""

_PRUNE = """\
Delete the steps of a run that none of the options keeps. Never deleted are the newest step that is whole,
pinned steps, and what is not complete or known to be damaged. Deletions that were cut off are finished.
"""

_PRUNE_EXAMPLES = """\
examples:
  holdfast prune run --last 3 --every 1000 --dry-run
  holdfast prune s3://bucket/run --last 2 --best 3 --metric loss
"""

_CLEAN = """\
Remove what killed saves have left in a checkpoint's folder, or in all folders of a run, and finish deletions
that were cut off. Only files go that a lease shows to be a dead save's. Needs torch.
"""

_CLEAN_EXAMPLES = """\
examples:
  holdfast clean run
  holdfast clean run/step-1000 --dry-run
"""

_COMPLETION = """\
Print a script by which a shell completes the commands and options of holdfast.
"""

_COMPLETION_EXAMPLES = """\
examples:
  holdfast completion bash > ~/.local/share/bash-completion/completions/holdfast
  holdfast completion zsh > "${fpath[1]}/_holdfast"
"""


def make_parser() -> argparse.ArgumentParser:
    """The parser of the whole command line. ``command`` is None where none was given."""
    parser = argparse.ArgumentParser(
        prog="holdfast",
        description=_ABOUT,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"holdfast {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands")
    _add_ls(_command(commands, "ls", "list tensors and objects", _LS, _LS_EXAMPLES))
    _add_show(
        _command(commands, "show", "what made it, when, how large, which files", _SHOW, "", several=True)
    )
    _add_verify(_command(commands, "verify", "check every byte", _VERIFY, _VERIFY_EXAMPLES, several=True))
    _add_trace(_command(commands, "trace", "how long the save took, and where", _TRACE, _TRACE_EXAMPLES))
    _add_report(_command(commands, "report", "draw it as an HTML page", _REPORT, _REPORT_EXAMPLES))
    _add_cp(_command(commands, "cp", "copy it to another place, checked", _CP, _CP_EXAMPLES))
    about_convert = "convert", "into another format, checked", _CONVERT, _CONVERT_EXAMPLES
    _add_convert(_command(commands, *about_convert))
    _add_diff(_command(commands, "diff", "compare it with another one", _DIFF, _DIFF_EXAMPLES))
    _add_bench(_command(commands, "bench", "how fast a storage is", _BENCH, _BENCH_EXAMPLES))
    _add_steps(_command(commands, "steps", "the steps of a run", _STEPS, _STEPS_EXAMPLES, root=True))
    _add_prune(_command(commands, "prune", "delete steps of a run", _PRUNE, _PRUNE_EXAMPLES, root=True))
    clean = _command(commands, "clean", "remove what killed saves left", _CLEAN, _CLEAN_EXAMPLES, root=True)
    clean.add_argument("--dry-run", action="store_true", help="only tell what would be removed")
    completion = _bare_command(
        commands, "completion", "completion of words by the shell", _COMPLETION, _COMPLETION_EXAMPLES
    )
    completion.add_argument("shell", choices=("bash", "zsh", "tcsh"), help="for which shell")
    return parser


def _command(
    commands: "argparse._SubParsersAction[argparse.ArgumentParser]",
    name: str,
    summary: str,
    about: str,
    examples: str,
    *,
    root: bool = False,
    several: bool = False,
) -> argparse.ArgumentParser:
    """A command on one checkpoint, on several, or on the root of a run."""
    parser = _bare_command(commands, name, summary, about, examples)
    if root:
        parser.add_argument("path", metavar="ROOT", help="the folder or URL that the steps of a run are in")
    elif several:
        parser.add_argument("paths", metavar="PATH", nargs="+", help=_PATH_HELP)
    else:
        parser.add_argument("path", metavar="PATH", help=_PATH_HELP)
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    return parser


def _bare_command(
    commands: "argparse._SubParsersAction[argparse.ArgumentParser]",
    name: str,
    summary: str,
    about: str,
    examples: str,
) -> argparse.ArgumentParser:
    return commands.add_parser(
        name,
        help=summary,
        description=about,
        epilog=examples,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def _add_ls(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "globs", metavar="GLOB", nargs="*", default=[], help="show only keys that match one of these"
    )
    parser.add_argument("--flat", action="store_true", help="one line per key instead of a tree")
    parser.add_argument(
        "--sort",
        choices=("size", "name"),
        help="largest first, or by name; default: in the order of the checkpoint",
    )
    parser.add_argument(
        "--depth", type=_positive, metavar="N", help="show N levels of the tree, and sums of what is below"
    )


def _add_show(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--all", action="store_true", help="list all files, however many there are")


def _add_verify(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-q", "--quiet", action="store_true", help="print only what is damaged, and no progress"
    )
    parser.add_argument(
        "--threads", type=_positive, metavar="N", help="how many threads read; default: 4 or fewer"
    )


def _add_trace(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-o", "--output", metavar="FILE", help="write a trace in the JSON format of Chrome")


def _add_report(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-o",
        "--output",
        metavar="FILE",
        default="report.html",
        help="where the page goes; default: report.html, which is replaced",
    )
    parser.add_argument("--verify", action="store_true", help="read every byte, and tell what is damaged")
    run = parser.add_argument_group("of a run", "which steps are kept, so that the page tells why")
    _add_keep(run)
    _add_name(run)


def _add_cp(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("target", metavar="TARGET", help="where to: a folder or URL, which need not exist")
    parser.add_argument("--overwrite", action="store_true", help="replace a checkpoint that is there")
    parser.add_argument("-q", "--quiet", action="store_true", help="print nothing, and no progress")


def _add_convert(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("target", metavar="TARGET", help="where to: a folder, file or URL")
    parser.add_argument(
        "--to",
        choices=("holdfast", "torch", "torch_save", "safetensors"),
        help="the format; default: torch_save if TARGET ends with .pt, .pth, .bin or .ckpt",
    )
    parser.add_argument(
        "--keys",
        metavar="GLOB",
        action="extend",
        nargs="+",
        help="take only keys that match one of these, and what is below them",
    )
    parser.add_argument(
        "--rename",
        metavar="OLD=NEW",
        action="append",
        default=[],
        type=_renaming,
        help="another name for a key, or for what is below it; OLD= takes the name away",
    )
    parser.add_argument("--dtype", metavar="DTYPE", help="cast floating-point tensors, such as to bfloat16")
    parser.add_argument("--max-shard-size", metavar="SIZE", help="of safetensors files; default: 5GB")
    parser.add_argument("--overwrite", action="store_true", help="replace what is at TARGET")
    parser.add_argument("-q", "--quiet", action="store_true", help="print nothing, and no progress")


def _renaming(text: str) -> tuple[str, str]:
    old, equals, new = text.partition("=")
    if not old or not equals:
        raise argparse.ArgumentTypeError(f"must be OLD=NEW, not {text!r}")
    return old, new


def _add_diff(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("other", metavar="OTHER", help="the checkpoint to compare with")
    parser.add_argument("-q", "--quiet", action="store_true", help="print nothing: the exit code tells")


def _add_steps(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--metrics", action="store_true", help="show the metrics that steps were saved with")
    _add_name(parser)


def _add_prune(parser: argparse.ArgumentParser) -> None:
    _add_keep(parser)
    parser.add_argument("--dry-run", action="store_true", help="only tell what would be deleted")
    _add_name(parser)


def _add_keep(parser: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    parser.add_argument("--last", type=_positive, metavar="N", help="keep the newest N")
    parser.add_argument("--every", type=_positive, metavar="N", help="keep multiples of N")
    parser.add_argument("--within", metavar="TIME", help="keep what was saved in this time before the newest")
    parser.add_argument("--steps", type=_numbers, metavar="A,B,...", help="keep these")
    parser.add_argument("--best", type=_positive, metavar="N", help="keep the best N; needs --metric")
    parser.add_argument("--metric", metavar="NAME", help="the metric for --best; the lowest is the best")
    parser.add_argument("--highest", action="store_true", help="the highest metric is the best")


def _add_name(parser: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    parser.add_argument(
        "--name", metavar="FORM", help="how folders are called, as step-{step}; default: as most of them are"
    )


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def _add_bench(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--size",
        type=_size,
        default=1 << 30,
        metavar="SIZE",
        help="how much to save, such as 4GiB; default: 1GiB",
    )
    parser.add_argument("--rounds", type=_positive, default=3, metavar="N", help="how often; default: 3")


_SIZE_UNITS = {
    "": 1,
    "KIB": 1 << 10,
    "MIB": 1 << 20,
    "GIB": 1 << 30,
    "K": 1 << 10,
    "M": 1 << 20,
    "G": 1 << 30,
}


def _size(text: str) -> int:
    number = text.rstrip("KMGiBkmgb")
    unit = text[len(number) :].upper()
    try:
        size = int(float(number) * _SIZE_UNITS[unit])
    except (KeyError, ValueError):
        raise argparse.ArgumentTypeError(f"must be a size such as 512MiB or 4GiB, not {text!r}") from None
    if size < 1 << 20:
        raise argparse.ArgumentTypeError(f"must be 1MiB or more, not {text}")
    return size


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be 1 or more, not {number}")
    return number
