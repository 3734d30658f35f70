"""``holdfast convert``: a checkpoint into another format, checked, and in one step."""

import argparse
import sys

from holdfast.cli.exit_codes import FINE, complain, exit_code
from holdfast.cli.text import Style, counted, printable, size_text, write_json, write_lines
from holdfast.errors import UnsafeMetadataError

__all__ = ["run"]


def run(arguments: argparse.Namespace) -> int:
    """Convert; print what was converted and return the exit code."""
    try:
        return _convert(arguments)
    except UnsafeMetadataError as error:
        what = (
            f"{error.key}: this value needs {error.found}, which was not run. If you trust {arguments.path}, "
        )
        what += f"pass --safe-global {error.found}, or take other values with --keys."
        return complain(what, exit_code(error))


def _convert(arguments: argparse.Namespace) -> int:
    # It brings torch, which takes seconds; looking at checkpoints must not.
    from holdfast._install.install_options import named_globals  # noqa: PLC0415
    from holdfast.conversion import convert  # noqa: PLC0415

    allowed = [found for name in arguments.safe_global for found in named_globals("--safe-global", name)]
    is_shown = Style(sys.stderr).is_terminal and not (arguments.quiet or arguments.json)
    result = convert(
        arguments.path,
        arguments.target,
        to=arguments.to,
        keys=arguments.keys,
        rename=dict(arguments.rename) or None,
        dtype=arguments.dtype,
        overwrite=arguments.overwrite,
        max_shard_size=arguments.max_shard_size,
        safe_globals=allowed,
        progress=is_shown,
    )
    if arguments.json:
        document = {"schema": "holdfast.convert/1", "path": arguments.path, "target": arguments.target}
        formats = {"source_format": result.source_format, "target_format": result.target_format}
        numbers = {"tensors": result.tensors, "objects": result.objects, "nbytes": result.nbytes}
        write_json({**document, **formats, **numbers})
    elif not arguments.quiet:
        others = f", {counted(result.objects, 'object')}" if result.objects else ""
        what = f"{counted(result.tensors, 'tensor')}{others}, {size_text(result.nbytes)}, all checked"
        places = f"{printable(arguments.path)} -> {printable(arguments.target)}"
        write_lines([f"{places}: {result.source_format} to {result.target_format}: {what}"])
    return FINE
