"""The local web page over run folders: ``posttrain view``, and the same page as one file."""
