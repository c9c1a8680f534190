//! `/limits`: the limit of bytes from the network, looked at and moved while generations wait at it.

use std::sync::Arc;

use axum::Json;
use axum::body::Body;
use axum::extract::State;
use serde_json::Value;

use super::Door;
use super::error::ApiError;
use super::generator::Generator;
use super::generator::Limit;
use super::params::Params;
use super::params::wrong_value;
use super::routes::read_body;
use crate::terms::Bytes;

pub(super) async fn look(State(door): State<Arc<Door>>) -> Result<Json<Limit>, ApiError> {
    Ok(Json(door.limited()?.limit()))
}

/// `{"max_bytes": 60000000000}`, or `"60GB"`, or null for no limit.
pub(super) async fn set(
    State(door): State<Arc<Door>>,
    body: Body,
) -> Result<Json<Limit>, ApiError> {
    let body = read_body(&door, body).await?;
    let limited = door.limited()?;
    let mut asked = Params::parse(&body)?;
    // Null is a value here; a parameter that is not there asks for nothing.
    if !asked.has("max_bytes") {
        return Err(wrong_value(
            "max_bytes",
            "it is missing, and all there is to be set",
        ));
    }
    let max_bytes = read(asked.take("max_bytes"))?;
    asked.end()?;
    limited.set_limit(max_bytes);
    Ok(Json(limited.limit()))
}

impl Door {
    /// Whose limit it is: the core of a large model may reach it before anything can be served.
    fn limited(&self) -> Result<&Arc<dyn Generator>, ApiError> {
        match self.coming.get() {
            Some(generator) => Ok(generator),
            None => Ok(self.queue()?.generator()),
        }
    }
}

fn read(said: Option<Value>) -> Result<Option<u64>, ApiError> {
    let read = match said {
        None => return Ok(None),
        Some(Value::Number(bytes)) => bytes.as_u64(),
        Some(Value::String(size)) => size.parse::<Bytes>().ok().map(|size| size.0),
        Some(_) => None,
    };
    let expected = "must be a number of bytes, a size such as \"60GB\", or null";
    read.map(Some)
        .ok_or_else(|| wrong_value("max_bytes", expected))
}
