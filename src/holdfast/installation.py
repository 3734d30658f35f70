"""``install()``: programs that call ``torch.distributed.checkpoint`` run on Holdfast, unchanged."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from holdfast._install.doors import doors
from holdfast._install.import_hook import is_watching, unwatch, watch
from holdfast._install.install_options import CheckReplicas, InstallOptions, read_options

__all__ = ["Installed", "install", "installed", "uninstall"]


@dataclass(frozen=True)
class Installed:
    """A report of what ``install()`` has done so far in this process.

    Attributes:
        active: Whether ``install()`` is in effect.
        replaced: Where modules have a function that leads to ours, such as
            ``"torch.distributed.checkpoint.save"``. Empty as long as torch's package is not imported.
        left_alone: Functions that stay torch's, or those of somebody who has replaced them, with the reason.
        strangers: Classes of storages, planners and stagers that were passed to a save or load and are used
            as they are, each with the reason. What such a class does is its own affair: a writer that
            overwrites files in place does so here, too.
        options: The options in effect.
    """

    active: bool
    replaced: tuple[str, ...] = ()
    left_alone: dict[str, str] = field(default_factory=dict)
    strangers: dict[str, str] = field(default_factory=dict)
    options: InstallOptions | None = None

    def __str__(self) -> str:
        """The report as text, a line for each thing."""
        if not self.active:
            return "holdfast is not installed"
        lines = ["holdfast is installed", *(f"  replaced: {name}" for name in self.replaced)]
        for what, reasons in (("left alone", self.left_alone), ("used as it is", self.strangers)):
            lines += [f"  {what}: {name}: {why}" for name, why in reasons.items()]
        return "\n".join(lines)


def install(
    *,
    strict: bool | None = None,
    cast: bool | None = None,
    check_replicas: CheckReplicas | None = None,
    allow_pickle: bool | None = None,
    safe_globals: Iterable[Callable[..., Any] | type] | None = None,
) -> None:
    """Let everything that calls ``torch.distributed.checkpoint`` save and load with Holdfast.

    The functions of torch's package are replaced where they are defined, and in every module that has
    imported them by name. If the package is not imported yet, that happens when it is. torch's own
    FileSystemWriter, FileSystemReader, FsspecWriter, FsspecReader, Hugging Face storages, default planners
    and stagers are translated into ours with the same settings, also if they were made before. Callers get
    torch's records and futures back, and exceptions that are instances of both CheckpointException classes.

    Classes of somebody's own are used as they are: :func:`installed` lists them. Functions that a program
    keeps elsewhere than in a module, such as in a class or as a default argument, are not replaced.

    A second call changes only the options. It concerns this process. For processes that this one starts, set
    ``HOLDFAST_INSTALL=1`` in the environment, or start the program by ``holdfast run``.

    The options are for those who cannot pass them to ``save`` and ``load``. One that is None comes from the
    environment: ``HOLDFAST_STRICT``, ``HOLDFAST_CAST`` and ``HOLDFAST_ALLOW_PICKLE`` (0 or 1),
    ``HOLDFAST_CHECK_REPLICAS`` (0, 1, full or raise), ``HOLDFAST_SAFE_GLOBALS`` (``package.module:Name``,
    with commas between several).

    Args:
        strict: As for :func:`holdfast.load`.
        cast: As for :func:`holdfast.load`.
        check_replicas: As for :func:`holdfast.save`.
        allow_pickle: As for :func:`holdfast.load`. torch allows it; Holdfast does not by default.
        safe_globals: As for :func:`holdfast.load`.

    Raises:
        UsageError: An option, or its variable of the environment, has a value that it cannot have.

    Example:
        >>> import holdfast
        >>> holdfast.install()
        >>> accelerator.save_state("checkpoint")  # unmodified, and on Holdfast
    """
    given = {
        "strict": strict,
        "cast": cast,
        "check_replicas": check_replicas,
        "allow_pickle": allow_pickle,
        "safe_globals": safe_globals,
    }
    options = read_options(given)
    watch()  # first, so that no module is imported between the two
    doors.open(options)


def uninstall() -> None:
    """Undo ``install()``: every module has torch's functions again, under the same names.

    Saves in the background go on. Functions that a program took while ``install()`` was in effect, and keeps
    elsewhere than in a module, call torch's from now on.
    """
    unwatch()
    doors.close()


def installed() -> Installed:
    """Tell what is replaced in this process, what is not, and why."""
    if not (doors.are_open or is_watching()):
        return Installed(active=False)
    return Installed(
        active=True,
        replaced=tuple(doors.places()),
        left_alone=dict(doors.left_alone),
        strangers=doors.strangers(),
        options=doors.options or read_options({}),
    )
