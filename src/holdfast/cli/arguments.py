"""The words that the commands understand."""

import argparse

from holdfast._version import __version__
from holdfast.cli.help_texts import ABOUT, COMMANDS, EPILOG

__all__ = ["make_parser"]

_PATH_HELP = "the checkpoint: a folder or a file, as a path or URL"


def make_parser() -> argparse.ArgumentParser:
    """The parser of the whole command line. ``command`` is None where none was given."""
    plain = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="holdfast", description=ABOUT, epilog=EPILOG, formatter_class=plain)
    parser.add_argument("--version", action="version", version=f"holdfast {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands")
    for name, (summary, about, examples) in COMMANDS.items():
        command = commands.add_parser(
            name, help=summary, description=about, epilog=examples, formatter_class=plain
        )
        _ARGUMENTS[name](command)
    return parser


def _add_checkpoint(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", metavar="PATH", help=_PATH_HELP)
    _add_json(parser)


def _add_checkpoints(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("paths", metavar="PATH", nargs="+", help=_PATH_HELP)
    _add_json(parser)


def _add_root(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", metavar="ROOT", help="the folder or URL that the steps of a run are in")
    _add_json(parser)


def _add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")


def _add_ls(parser: argparse.ArgumentParser) -> None:
    _add_checkpoint(parser)
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
    _add_checkpoints(parser)
    parser.add_argument("--all", action="store_true", help="list all files, however many there are")


def _add_verify(parser: argparse.ArgumentParser) -> None:
    _add_checkpoints(parser)
    parser.add_argument(
        "-q", "--quiet", action="store_true", help="print only what is damaged, and no progress"
    )
    parser.add_argument(
        "--threads", type=_positive, metavar="N", help="how many threads read; default: 4 or fewer"
    )


def _add_trace(parser: argparse.ArgumentParser) -> None:
    _add_checkpoint(parser)
    parser.add_argument("-o", "--output", metavar="FILE", help="write a trace in the JSON format of Chrome")


def _add_report(parser: argparse.ArgumentParser) -> None:
    _add_checkpoint(parser)
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
    _add_checkpoint(parser)
    parser.add_argument("target", metavar="TARGET", help="where to: a folder or URL, which need not exist")
    parser.add_argument("--overwrite", action="store_true", help="replace a checkpoint that is there")
    parser.add_argument("-q", "--quiet", action="store_true", help="print nothing, and no progress")


def _add_convert(parser: argparse.ArgumentParser) -> None:
    _add_checkpoint(parser)
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
    parser.add_argument(
        "--safe-global",
        metavar="NAME",
        action="append",
        default=[],
        help="import and run this class or function, as package.module:Name, where a value needs it",
    )
    parser.add_argument("-q", "--quiet", action="store_true", help="print nothing, and no progress")


def _renaming(text: str) -> tuple[str, str]:
    old, equals, new = text.partition("=")
    if not old or not equals:
        raise argparse.ArgumentTypeError(f"must be OLD=NEW, not {text!r}")
    return old, new


def _add_diff(parser: argparse.ArgumentParser) -> None:
    _add_checkpoint(parser)
    parser.add_argument("other", metavar="OTHER", help="the checkpoint to compare with")
    parser.add_argument("-q", "--quiet", action="store_true", help="print nothing: the exit code tells")


def _add_steps(parser: argparse.ArgumentParser) -> None:
    _add_root(parser)
    parser.add_argument("--metrics", action="store_true", help="show the metrics that steps were saved with")
    _add_name(parser)


def _add_prune(parser: argparse.ArgumentParser) -> None:
    _add_root(parser)
    _add_keep(parser)
    parser.add_argument("--dry-run", action="store_true", help="only tell what would be deleted")
    _add_name(parser)


def _add_clean(parser: argparse.ArgumentParser) -> None:
    _add_root(parser)
    parser.add_argument("--dry-run", action="store_true", help="only tell what would be removed")


def _add_run(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("words", metavar="CMD", nargs=argparse.PARSER, help="the command, with its arguments")


def _add_completion(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=("bash", "zsh", "tcsh"), help="for which shell")


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
    return [_whole(part) for part in text.split(",")]


def _whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a whole number, not {text!r}") from None


def _add_bench(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", metavar="DIR", help="a folder or URL on the storage to measure")
    _add_json(parser)
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
    number = _whole(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be 1 or more, not {number}")
    return number


_ARGUMENTS = {
    "ls": _add_ls,
    "show": _add_show,
    "verify": _add_verify,
    "trace": _add_trace,
    "report": _add_report,
    "cp": _add_cp,
    "convert": _add_convert,
    "diff": _add_diff,
    "bench": _add_bench,
    "steps": _add_steps,
    "prune": _add_prune,
    "clean": _add_clean,
    "run": _add_run,
    "completion": _add_completion,
}
