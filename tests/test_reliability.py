"""tests/faults/README.md is the index of the tests that cause faults."""

from helpers import faults


def test_every_row_names_tests_that_cause_its_fault():
    marked = faults.marked()
    missing = [
        (number, name)
        for number, row in faults.rows().items()
        for name in row.tests
        if not any(number in marked[test] for test in marked if _names(name, test))
    ]
    assert not missing


def test_every_fault_that_is_caused_has_a_row_that_names_the_test():
    rows = faults.rows()
    unnamed = [
        (number, test)
        for test, numbers in faults.marked().items()
        for number in numbers
        if not any(_names(name, test) for name in getattr(rows.get(number), 'tests', ()))
    ]
    assert not unnamed


def test_every_row_names_a_test_and_the_numbers_follow_one_another():
    rows = faults.rows()
    assert list(rows) == list(range(1, len(rows) + 1))
    assert [number for number, row in rows.items() if not row.tests] == []


def _names(name: str, test: str) -> bool:
    """Whether what a row names, a test or a whole file, is or holds the test."""
    return name in (test, test.partition('::')[0])
