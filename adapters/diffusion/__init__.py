"""Pictures, video and sound by diffusers' pipelines, scheduled by the model call instead of by the request."""
