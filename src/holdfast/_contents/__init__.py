"""What a checkpoint of any format holds, found, read and checked without torch."""
