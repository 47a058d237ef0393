"""Who may write where and until when: rendezvous, handshake, the request state machine, the endpoint."""
