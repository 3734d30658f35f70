"""The one place where the package's version stands."""

__version__ = "0.1.0.dev0"
