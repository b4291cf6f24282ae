"""The tables of docs/local-sgd.md are what their script makes from the stored rows."""

from scripts.pages.local_sgd import losses, speeds


def test_tables_begin_with_data_parallelism():
    tables = losses("bytes"), losses("quickstart"), speeds()
    assert all(table.splitlines()[2].startswith("| data parallelism |") for table in tables)
