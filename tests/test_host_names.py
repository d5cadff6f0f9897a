import time

import pytest

from megatron_untied.platform.host_names import require_resolvable


def test_a_name_that_does_not_resolve_is_said_at_once_and_refused_soon():
    said, began = [], time.monotonic()
    with pytest.raises(ValueError, match=r"^MASTER_ADDR is node\.invalid, which does not resolve"):
        require_resolvable("node.invalid", "MASTER_ADDR", warn=said.append, retry_seconds=1.5)
    assert len(said) == 1
    assert "MASTER_ADDR node.invalid does not resolve" in said[0]
    assert time.monotonic() - began < 30


def test_a_name_that_resolves_late_is_waited_for(monkeypatch):
    answers, said = [OSError(-2, "Name or service not known"), []], []

    def resolve(host, port):
        answer = answers.pop(0)
        if isinstance(answer, OSError):
            raise answer
        return answer

    monkeypatch.setattr("socket.getaddrinfo", resolve)
    require_resolvable("pod-0", "MASTER_ADDR", warn=said.append, retry_seconds=5)
    assert answers == []
    assert len(said) == 1


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "::1"])
def test_what_resolves_is_taken_without_a_word(host):
    require_resolvable(host, "MASTER_ADDR", warn=pytest.fail)
