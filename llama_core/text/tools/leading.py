"""For formats whose calls are the whole answer: a call is looked for at the beginning of the answer only."""

from abc import abstractmethod

from llama_core.text.tools.json_scan import MORE, SPACES, Miss
from llama_core.text.tools.parser import CallHead, CallParser


class LeadingCalls(CallParser):
    """A format gives `_leading` instead of `_opening`. Any other beginning makes the whole answer text."""

    _is_decided = False

    def _find(self, text: str) -> int:
        return len(text) if self._is_decided else len(text) - len(text.lstrip(SPACES))

    def _opening(self, text: str, at: int) -> CallHead | Miss:
        head = self._leading(text, at)
        self._is_decided = head is not MORE or self._ended
        return head

    @abstractmethod
    def _leading(self, text: str, at: int) -> CallHead | Miss:
        """The head of the call with which the answer begins, at its first character that is no white space."""
