"""The double's tokenizer: how many tokens a text has. Deterministic, near what the models' own make of English and code.

A token is a run of up to six letters with the blank before it, a single digit, a run of up to four blanks, or any other
single character. `x` * 6 is one token, `hello` one, `12345` five, `The quick brown fox` four.
"""

import re

TOKEN = re.compile(r" ?[^\W\d_]{1,6}|\d| {1,4}|\s|.", re.DOTALL)
# What a chat costs beyond its words: role and end marks of a message, and the mark that opens the answer.
PER_MESSAGE, OPENING = 5, 6


def count(text):
    return sum(1 for _ in TOKEN.finditer(text))


def split(text):
    return TOKEN.findall(text)


def content(message):
    """The text of a chat message, whose content may be a string or a list of parts."""
    body = message.get("content")
    if isinstance(body, list):
        return "".join(part.get("text", "") for part in body if isinstance(part, dict))
    return body or ""


def chat(messages):
    """(text, tokens) of a conversation."""
    texts = [content(message) for message in messages]
    return "\n".join(texts), sum(PER_MESSAGE + count(text) for text in texts) + OPENING
