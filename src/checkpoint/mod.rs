//! Which bytes of which shard are which tensor; `config.json` of a K3-family model.
