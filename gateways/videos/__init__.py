"""`/v1/videos` and `WS /v1/realtime/video`: jobs, their files, and clips that are watched while they are made."""
