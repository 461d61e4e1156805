"""Mathematics as models write it: read, and compared with the right answer."""
