"""The parts of ``holdfast.install()``: torch's own functions lead to ours, and what goes through is translated."""
