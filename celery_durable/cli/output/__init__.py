"""What commands print: for people on a terminal, for programs in a pipe."""
