"""The demos: each does something whole, shows it in a table, and checks what it claims."""
