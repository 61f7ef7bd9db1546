"""The limits of a grammar's time and memory while a text follows it, which refusals name."""

MAX_LEXER_STATES = 50_000
"""States of the regular expressions that one text may need: 1 to 2 kB each."""
MAX_LEXER_STEPS = 200_000
"""Steps of the regular expressions for one token: 15 ms of a mask."""
MAX_PARSER_ITEMS = 50_000
"""Items of the parser for one token: 3 ms of a mask."""
