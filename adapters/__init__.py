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
    "whisper": "adapters.whisper:Whisper",
    "transformers-whisper": "adapters.transformers_whisper:TransformersWhisper",
    "pocketsphinx": "adapters.pocketsphinx:PocketSphinx",
    "silero-vad": "adapters.silero_vad:SileroVad",
    "smart-turn": "adapters.smart_turn:SmartTurn",
    "synthetic-text": "adapters.synthetic:SyntheticText",
    "synthetic-speech": "adapters.synthetic:SyntheticSpeech",
    "synthetic-image": "adapters.synthetic:SyntheticImage",
    "synthetic-video": "adapters.synthetic:SyntheticVideo",
    "synthetic-actions": "adapters.synthetic_actions:SyntheticActions",
    "synthetic-relay": "adapters.synthetic:SyntheticRelay",
}
