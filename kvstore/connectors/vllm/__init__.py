"""vLLM's KV connector: ``kv_connector_module_path`` is ``kvstore.connectors.vllm.connector``.

The scheduler's process asks the sidecar what it has and holds the leases; each worker's process
copies whole blocks between the engine's memory and the sidecar's. Only ``connector``, ``engine``
and ``stats`` import vLLM.
"""
