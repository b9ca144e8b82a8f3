"""What a text of JSON has written so far, without the contents of strings that are values and the spaces between values."""

from dataclasses import dataclass, field
from typing import Final

from llama_core.execution.grammars.json_vocabulary import SPACES, JsonText

_QUOTE: Final = 0x22
_CLOSERS: Final = {ord("}"): b"{", ord("]"): b"["}
_MOST_BYTES: Final = 4096


@dataclass(slots=True)
class JsonOutline:
    """text: the outline, b"" beyond 4,096 bytes. in_value: the JSON text is within a string that is a value.

    The same values may follow equal outlines, where no string's text decides between alternatives of the schema.
    """

    text: bytes = b""
    in_value: bool = False
    _place: JsonText = field(default_factory=JsonText)
    _open: bytes = b""  # the brackets around the place
    _last: int = 0  # the last character outside of strings but spaces
    _is_long: bool = False

    def copy(self) -> "JsonOutline":
        return JsonOutline(self.text, self.in_value, self._place.copy(), self._open, self._last, self._is_long)

    def append(self, text: bytes) -> None:
        place, written = self._place, bytearray()
        for i, char in enumerate(text):
            was_in_string = place.in_string
            place.append(text[i : i + 1])
            if not was_in_string and place.in_string:
                self.in_value = not (self._open[-1:] == b"{" and self._last in b"{,")
            elif not was_in_string and char in b"[{":
                self._open += text[i : i + 1]
            elif not was_in_string and char in _CLOSERS and self._open[-1:] == _CLOSERS[char]:
                self._open = self._open[:-1]
            is_space = not was_in_string and char in SPACES
            if not is_space and not (was_in_string and place.in_string and self.in_value):
                written.append(char)
            if not place.in_string:
                self.in_value = False
                self._last = self._last if is_space else char
        self._is_long = self._is_long or len(self.text) + len(written) > _MOST_BYTES
        self.text = b"" if self._is_long else self.text + written
