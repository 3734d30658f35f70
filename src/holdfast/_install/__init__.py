"""The parts of ``holdfast.install()``: torch's functions lead to ours, and arguments are translated."""
