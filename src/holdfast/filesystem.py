"""Checkpoints in a folder of a file system, under torch's names: the storage that is used by default."""

from holdfast._file_system import FileSystem, FileSystemBase
from holdfast._folder_reader import FileSystemReader
from holdfast._folder_writer import FileSystemWriter, SerializationFormat
from holdfast.storage import WriteResult

__all__ = [
    "FileSystem",
    "FileSystemBase",
    "FileSystemReader",
    "FileSystemWriter",
    "SerializationFormat",
    "WriteResult",
]

for _class in (FileSystemReader, FileSystemWriter, SerializationFormat):
    _class.__module__ = __name__  # what programs see, and what pickles name
