"""Which lines count as lines of code."""

from tests.count_lines import lines_of_code


def test_blanks_comments_and_docstrings_are_no_lines_of_code():
    assert lines_of_code('"""One.\n\nTwo."""\n\n# why\nx = 1  # what\n"""The text\nunder a field."""\n\n'
                         'def f(\n    a,\n):\n    """See."""\n    return """\n\n# not a comment\n"""\n') == 8
