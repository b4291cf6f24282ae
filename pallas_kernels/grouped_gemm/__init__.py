"""One matmul for each group of rows: `api.grouped_matmul` chooses among this folder's backends."""
