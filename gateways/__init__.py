"""The gateway table: a protocol and where its class is. Strings only, so that reading it loads nothing."""

GATEWAYS: dict[str, str] = {
    "openai": "gateways.openai:OpenAIGateway",
    "moshi": "gateways.moshi:MoshiGateway",
    "openpi": "gateways.robot.openpi:OpenPIGateway",
}
