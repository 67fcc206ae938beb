"""Tables: the papers' tables and figures, defined in TOML files and filled from finished runs, and charts."""
