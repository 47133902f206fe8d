"""What a `redis.url` of Sentinels says, and what is said of one that is wrong."""

from __future__ import annotations

import pytest

from pipeline.config import RedisSettings
from pipeline.config.sentinel import SentinelUrl
from pipeline.errors import ConfigError
from pipeline.settings.files import load_config, mask_url
from pipeline.streams import connect

FULL = "rediss+sentinel://me:s%40cret@one:1,[::1]:2,three/my%20queues/4?ssl_ca_certs=/ca.crt&sentinel_password=hunter2"


def test_every_part_of_a_url_is_read() -> None:
    url = SentinelUrl.parse(FULL)
    assert url.sentinels == (("one", 1), ("::1", 2), ("three", 26379))
    assert (url.service, url.username, url.password) == ("my queues", None, "hunter2")
    client = connect(RedisSettings(), FULL)
    words = client.connection_pool.connection_kwargs
    assert (words["username"], words["password"], words["db"], words["ssl_ca_certs"]) == ("me", "s@cret", 4, "/ca.crt")
    assert "host" not in words


def test_neither_password_is_shown() -> None:
    shown = mask_url(FULL)
    assert "s%40cret" not in shown
    assert "hunter2" not in shown
    assert "three/my%20queues/4" in shown


@pytest.mark.parametrize(
    ("url", "complaint"),
    [
        ("redis+sentinel://me:secret@one:1", "name of their service"),
        ("redis+sentinel://me:secret@one:1/queues/0/1", "name of their service"),
        ("redis+sentinel://me:secret@one:port/queues", "each Sentinel should be host:port"),
        ("redis+sentinel://me:secret@one:1,/queues", "each Sentinel should be host:port"),
        ("redis+sentinel://me:secret@one:1/queues/first", "not the number of a database"),
        ("sentinel://me:secret@one:1/queues", "look like redis\\+sentinel://"),
    ],
)
def test_a_url_that_is_wrong_is_refused_with_how_it_should_look(url: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint) as caught:
        load_config([], environ={"REDIS_URL": url}, overrides=[])
    assert "secret" not in str(caught.value)
