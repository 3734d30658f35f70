"""The name under which torch has ``holdfast.extension``; import that instead in new code."""

from holdfast.extension import Extension, ExtensionRegistry, StreamTransformExtension, ZStandard

__all__ = ["Extension", "ExtensionRegistry", "StreamTransformExtension", "ZStandard"]
