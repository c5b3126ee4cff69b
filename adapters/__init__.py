"""The adapter table: a name and where its class is. Strings only, so that reading it loads nothing."""

ADAPTERS: dict[str, str] = {
    "llamacpp": "adapters.llamacpp:LlamaCpp",
    "transformers": "adapters.transformers_text:TransformersText",
    "transformers-embedding": "adapters.transformers_embedding:TransformersEmbedding",
    "transformers-image-text": "adapters.transformers_image_text:TransformersImageText",
    "vllm": "adapters.vllm_text:VllmText",
    "vllm-embedding": "adapters.vllm_embedding:VllmEmbedding",
    "openai": "adapters.remote_openai:RemoteOpenAI",
    "hibari": "adapters.hibari:HibariVoice",
    "realtime": "actors.sessions:Sessions",
    "synthetic-text": "adapters.synthetic:SyntheticText",
    "synthetic-speech": "adapters.synthetic:SyntheticSpeech",
    "synthetic-vad": "adapters.synthetic_ears:SyntheticVad",
    "synthetic-asr": "adapters.synthetic_ears:SyntheticAsr",
    "synthetic-image": "adapters.synthetic:SyntheticImage",
    "synthetic-video": "adapters.synthetic:SyntheticVideo",
    "synthetic-actions": "adapters.synthetic_actions:SyntheticActions",
    "synthetic-relay": "adapters.synthetic:SyntheticRelay",
}
