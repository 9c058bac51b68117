"""City names for hidden facts: different words of about the same length, so that prompts differ little in tokens."""

from __future__ import annotations


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


CITIES = _words(
    "Lisbon Madrid Vienna Prague Warsaw Athens Berlin Dublin Zagreb Tirana Ankara Manila Lahore Mumbai Bogota Havana "
    "Nairobi Kampala Algiers Jakarta Bangkok Toronto Chicago Seattle Houston Caracas Santiago Montreal Budapest "
    "Helsinki Istanbul Brussels Belgrade Damascus Khartoum Kinshasa Shanghai Sydney Auckland Adelaide"
)
