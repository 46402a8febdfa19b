"""JSON without the imports of the json module (regular expressions, enums: half of a program's start); its C parts are used directly."""

from __future__ import annotations

import _json


class _Plain:
    """What the C scanner asks for; the defaults of json.loads."""

    strict, object_hook, object_pairs_hook, memo = True, None, None, {}  # type: ignore[var-annotated]
    parse_float, parse_int, parse_constant = float, int, float


_scan = _json.make_scanner(_Plain)
_encode = _json.make_encoder(None, None, _json.encode_basestring_ascii, None, ": ", ", ", False, False, True)


def loads(text):  # type: ignore[no-untyped-def]
    """As json.loads. Raises ValueError."""
    try:
        return _scan(text.strip(), 0)[0]
    except StopIteration:
        raise ValueError("no JSON") from None


def dumps(value):  # type: ignore[no-untyped-def]
    """As json.dumps."""
    return "".join(_encode(value, 0))
