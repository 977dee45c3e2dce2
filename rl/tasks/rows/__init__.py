"""Problems from the rows of tables: files, datasets, functions; and published datasets by a line each."""
