"""Generation of answers to questions, each formatted as a chat by the tokenizer's chat template."""

from collections.abc import Iterator, Sequence

from jaxstack.data.config import ChatConfig
from jaxstack.data.streams import import_chat
from jaxstack.data.tokenizer import Tokenizer
from jaxstack.decoding.sampling import Sampling
from jaxstack.decoding.text_stream import Piece, TextGenerator
from jaxstack.errors import ConfigError


class ChatGenerator(TextGenerator):
    """Generates answers to questions, using the tokenizer's chat template and stopping where the answer ends.

    Args:
      generator: a generator for the same model; its `opening` is not used, because the template opens a chat.

    Raises:
      ConfigError: the tokenizer has no chat template.
      JaxstackError: the template cannot format a question with its answer.
    """

    def __init__(self, generator: TextGenerator):
        tokenizer = generator.tokenizer
        if tokenizer.chat is None or tokenizer.chat.template is None:
            raise ConfigError(
                "the tokenizer has no chat template: leave out --chat (in Python: chat=True), or add the model's "
                "chat_template.jinja next to the files of its tokenizer."
            )
        template = import_chat().open_chats(ChatConfig(), tokenizer).template
        assert template is not None
        end = template.find_answer_end(tokenizer.special_tokens)
        special = tokenizer.special_tokens.get(end)
        stop_tokens = generator.stop_tokens if special is None else generator.stop_tokens | {special}
        super().__init__(generator.decoder, tokenizer, (), stop_tokens)
        self._template = template
        self._stop = (end,) if end and special is None else ()

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a chat with one question, up to where the model's answer begins.

        Raises:
          ConfigError: the question contains a special token.
        """
        check_chat_text(self.tokenizer, "the prompt", text)
        question = self._template.render([{"role": "user", "content": text}], prompt=True)
        return self.tokenizer.encode_marked([question])[0][0].tolist()

    def stream(
        self,
        prompts: Sequence[Sequence[int]],
        max_tokens: int,
        sampling: Sampling,
        *,
        seed: int | Sequence[int] = 0,
        stop: Sequence[str] = (),
    ) -> Iterator[Piece]:
        """Answer a batch of questions: yield pieces of the answers as tokens are generated."""
        return super().stream(prompts, max_tokens, sampling, seed=seed, stop=(*stop, *self._stop))


def check_chat_text(tokenizer: Tokenizer, name: str, text: str) -> None:
    """Raise ConfigError if the text of a chat, called `name`, contains a special token, as it could begin a turn."""
    found = next((token for token in tokenizer.special_tokens if token in text), None)
    if found is not None:
        raise ConfigError(
            f"{name} contains {found!r}, a special token, with which the text could pass for another turn; write it "
            "differently."
        )
