"""Leaves out of answers the text that a chat template writes after each of them, which the model then writes too.

Llama 2 was trained on answers that end in a space before end-of-sequence. The Python API returns it, as Meta's reference does.
"""

from deployments.engine.interface import Delta, TokenStream
from llama_core.scheduling.request import FinishReason


class AnswerEnding:
    """Of one choice. Holds the ending back until further text, or the answer's end, shows what it is."""

    def __init__(self, ending: str) -> None:
        self._ending = ending
        self._is_held = False

    def without(self, delta: Delta, stream: TokenStream) -> Delta:
        """The next delta without the ending, unless the answer ends in another way than by end-of-sequence."""
        ending, was_held = self._ending, self._is_held
        if delta.text:
            self._is_held = delta.text.endswith(ending)
        elif delta.finish_reason is None:
            return delta
        text = ending + delta.text if was_held and delta.text else delta.text
        if self._is_held:
            text = text.removesuffix(ending)
            if delta.finish_reason is not None and not _ends_by_itself(delta, stream):
                text += ending
        return delta if text == delta.text else delta._replace(text=text)


def _ends_by_itself(delta: Delta, stream: TokenStream) -> bool:
    return delta.finish_reason is FinishReason.STOP and stream.matched_stop is None
