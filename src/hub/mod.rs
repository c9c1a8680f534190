//! Verified byte ranges over HTTP, politely, from several sources.
