"""The version of the package, and the version of torch by whose rules states are flattened."""

__version__ = "0.1.0.dev0"

# "2_3" lets _nested_dict.flatten_state_dict follow the rules of torch before 2.4; torch has the same switch.
_derived_version: str | None = None
