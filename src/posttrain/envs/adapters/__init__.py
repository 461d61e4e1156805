"""Environments of other libraries, one file each: a library is imported when it is played."""
