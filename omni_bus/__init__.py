"""omni-bus: omni-modality pipelines as independent actor processes on a ZeroMQ bus.

Glossary. A **deployment** is what one configuration file starts. A **pipeline** is a graph of **stages** joined by
**edges**, each from one stage's output **port** to another's input port. A stage runs in one or more **replicas**, each
an **actor** (a process) that hosts one **engine**, written as an **adapter**. **Gateways** are actors that speak
clients' protocols. A **request** runs over a **route**, one bound replica for each needed stage. On an edge travel
**chunks**, each with a **payload**, under **credit** that the receiver grants. The **coordinator** admits, binds and
cancels; the **supervisor** starts and watches processes.
"""

__version__ = "0.1.0"
