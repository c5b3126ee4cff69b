"""Live conversations over WebSockets: a route, and the dialects that its clients speak."""
