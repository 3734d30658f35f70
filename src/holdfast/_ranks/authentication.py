"""How the two ends of a new connection prove to each other that they know the group's secret.

The secret itself is never sent, and a recording of an earlier proof is worth nothing:

1. The listener sends a *challenge*: random bytes, new for each connection.
2. The connecting rank sends its *answer*: random bytes of its own, its request, and an HMAC-SHA256 of the
   challenge and these under the secret.
3. The listener checks it, and only then sends its *reply*: a port, and an HMAC of all that was said before.
4. The connecting rank checks it, and only then uses the connection.

All messages have a fixed size and are read without pickle. The two proofs begin with different words, so that
neither can be sent back as the other. Not guaranteed: secrecy of what is sent later, nor that somebody who
controls the network between two hosts cannot change it.
"""

import hmac
import secrets
import struct
from typing import NamedTuple

CHALLENGE_SIZE = 32
_PROOF_SIZE = 32
_REQUEST = struct.Struct("!IH16s")
_PORT = struct.Struct("!H")
ANSWER_SIZE = CHALLENGE_SIZE + _REQUEST.size + _PROOF_SIZE
REPLY_SIZE = _PORT.size + _PROOF_SIZE


class ConnectionRequest(NamedTuple):
    """What a rank wants of the listener that it connects to.

    Attributes:
        rank: Its rank.
        heartbeat_port: Where its heartbeat can be seen; 0 if nowhere.
        broadcast: The key of the broadcast that the connection is for; none if it is for messages.
    """

    rank: int
    heartbeat_port: int = 0
    broadcast: bytes = bytes(16)


def new_secret() -> bytes:
    """Return the secret of a new channel."""
    return secrets.token_bytes(32)


def answer(secret: bytes, challenge: bytes, request: ConnectionRequest) -> bytes:
    """Return what the connecting rank sends after it has received the challenge."""
    said = secrets.token_bytes(CHALLENGE_SIZE) + _REQUEST.pack(*request)
    return said + _proof(secret, b"connecting", challenge + said)


def check_answer(secret: bytes, challenge: bytes, answered: bytes) -> ConnectionRequest | None:
    """Return the request of an answer; None if the sender does not know the secret."""
    said, proof = answered[:-_PROOF_SIZE], answered[-_PROOF_SIZE:]
    if not hmac.compare_digest(proof, _proof(secret, b"connecting", challenge + said)):
        return None
    return ConnectionRequest(*_REQUEST.unpack_from(said, CHALLENGE_SIZE))


def reply(secret: bytes, challenge: bytes, answered: bytes, heartbeat_port: int) -> bytes:
    """Return what the listener sends after it has checked the answer."""
    said = _PORT.pack(heartbeat_port)
    return said + _proof(secret, b"listening", challenge + answered + said)


def check_reply(secret: bytes, challenge: bytes, answered: bytes, replied: bytes) -> int | None:
    """Return the heartbeat port of a reply; None if the listener does not know the secret."""
    said, proof = replied[:-_PROOF_SIZE], replied[-_PROOF_SIZE:]
    if not hmac.compare_digest(proof, _proof(secret, b"listening", challenge + answered + said)):
        return None
    return int(_PORT.unpack(said)[0])


def _proof(secret: bytes, side: bytes, said: bytes) -> bytes:
    return hmac.digest(secret, side + said, "sha256")
