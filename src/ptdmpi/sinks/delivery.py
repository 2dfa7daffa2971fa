"""Delivery of one message about a run, by an HTTP request or by e-mail."""

import json
import smtplib
import socket
import ssl
import urllib.request
from collections.abc import Mapping
from email.message import EmailMessage
from typing import Any
from urllib.parse import unquote, urlsplit

LIMIT_S = 10.0  # time limit of each network operation, in seconds
DEFAULT_SERVER = "smtp://localhost"


def post(address: str, content: Mapping[str, Any]) -> None:
    """Send `content` as JSON to the web address `address`. Raise an exception if the server does
    not accept the message."""
    body = json.dumps(content).encode()
    request = urllib.request.Request(address, body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=LIMIT_S) as answer:
        answer.read(1)


def mail(address: str, server: str, subject: str, content: Mapping[str, Any]) -> None:
    """Send `content` as an e-mail to `address`, with the first line of `subject` as its subject.
    `server` is the address of the mail server, in the form smtp://USER:PASSWORD@HOST:PORT or
    smtps://... If `server` is empty, the mail server on this host is used. A password is sent only
    over an encrypted connection. Raise an exception if the server does not accept the e-mail.
    """
    place = urlsplit(server or DEFAULT_SERVER)
    user, password = unquote(place.username or ""), unquote(place.password or "")
    message = EmailMessage()
    message["Subject"] = subject.partition("\n")[0]
    message["From"] = user if "@" in user else f"ptdmpi@{socket.getfqdn()}"
    message["To"] = address
    message.set_content("\n".join(f"{name}: {value}" for name, value in content.items()))
    host = place.hostname or "localhost"
    secure = ssl.create_default_context()
    if place.scheme == "smtps":
        connection: smtplib.SMTP = smtplib.SMTP_SSL(
            host, place.port or 465, timeout=LIMIT_S, context=secure
        )
    else:
        connection = smtplib.SMTP(host, place.port or (587 if user else 25), timeout=LIMIT_S)
    with connection:
        if user and place.scheme != "smtps":
            connection.starttls(context=secure)
        if user:
            connection.login(user, password)
        connection.send_message(message)
