"""The words that the commands understand, and the help that explains them."""

import argparse

from holdfast._version import __version__

__all__ = ["make_parser"]

_ABOUT = """\
Look into checkpoints and check them: those of holdfast, and those of
torch.distributed.checkpoint. Needs neither torch nor the model, and changes nothing.
"""

_EPILOG = """\
exit codes:
  0  fine
  1  the checkpoint is damaged
  2  the command was used wrongly
  3  there is no checkpoint, or it cannot be read

`holdfast COMMAND --help` explains a command.
"""

_PATH_HELP = "the checkpoint's folder, or the .metadata file in it"

_LS = """\
List what a checkpoint holds: every tensor with dtype, shape and size, and in how many chunks it was
saved if there are several. Values that are not tensors are shown as objects.

A GLOB picks keys by their flat name, with *, ? and [...], upper and lower case apart; * also matches
dots. Quote it, or the shell takes it for itself.
"""

_LS_EXAMPLES = """\
examples:
  holdfast ls run/step-1000
  holdfast ls run/step-1000 'model.layers.0.*' '*.bias'
  holdfast ls run/step-1000 --depth 2          how the bytes are spread
  holdfast ls run/step-1000 --flat --sort size the largest first, one line per key
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
  holdfast verify -q run/step-1000 || echo 'do not resume from this one'
  holdfast verify run/step-1000 --json | jq '.damage[].keys[]'
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
    _add_show(_command(commands, "show", "what made it, when, how large, which files", _SHOW, ""))
    _add_verify(_command(commands, "verify", "check every byte", _VERIFY, _VERIFY_EXAMPLES))
    return parser


def _command(
    commands: "argparse._SubParsersAction[argparse.ArgumentParser]",
    name: str,
    summary: str,
    about: str,
    examples: str,
) -> argparse.ArgumentParser:
    parser = commands.add_parser(
        name,
        help=summary,
        description=about,
        epilog=examples,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("path", metavar="PATH", help=_PATH_HELP)
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    return parser


def _add_ls(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("globs", metavar="GLOB", nargs="*", help="show only keys that match one of these")
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


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be 1 or more, not {number}")
    return number
