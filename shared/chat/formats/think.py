"""Reasoning between tags, such as `<think>` and `</think>`, at the beginning of a message."""

from pagewire.shared.chat.reader import Reader, Steps


def think(reader: Reader, tags: tuple[str, str], *, opened: bool) -> Steps[None]:
    """Reads the reasoning, if the message begins with it, up to the closing tag or to the end.

    `opened`: whether the prompt has the opening tag; the text may repeat it.
    """
    begin, end = tags
    reader.mark()
    yield from reader.space()
    if not (yield from reader.optional(begin)) and not opened:
        reader.refuse()
        return
    reader.commit()
    reader.out.separate()
    yield from reader.until(end, reader.out.reasoning)
    reader.out.separate()
