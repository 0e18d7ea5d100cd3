"""Untrusted text appears on a terminal and in a runner's log only as text."""

from __future__ import annotations

from leanstep.escape import for_terminal, for_workflow, printable


def test_control_and_formatting_characters_become_escapes():
    assert printable("a\x1b[2J\n\u202eb\ud800") == "a\\x1b[2J\\n\\u202eb\\ud800"
    assert printable("größer → 3 ms") == "größer → 3 ms"


def test_a_line_of_a_terminal_is_no_workflow_command():
    assert (
        for_terminal("  ::error::x\n\tfine :: here\n##[error]x")
        == "  \\::error::x\n\tfine :: here\n\\##[error]x"
    )


def test_a_workflow_command_ends_where_it_should():
    assert for_workflow("50%\n::error::x\x1b") == "50%25%0A::error::x\\x1b"
    assert for_workflow("a:b,c", property=True) == "a%3Ab%2Cc"
