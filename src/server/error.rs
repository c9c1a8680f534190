//! Errors in OpenAI's shape.

use axum::Json;
use axum::http::HeaderValue;
use axum::http::StatusCode;
use axum::http::header;
use axum::response::IntoResponse;
use axum::response::Response;
use serde_json::Value;
use serde_json::json;

use super::generator::Failure;
use crate::text::TextError;

/// A reply that says no.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct ApiError {
    pub(super) status: StatusCode,
    /// `type` in OpenAI's words.
    kind: &'static str,
    message: String,
    param: Option<String>,
    code: Option<&'static str>,
    /// Seconds after which asking again may help.
    retry_after: Option<u64>,
}

impl ApiError {
    /// The request is wrong; `param` says where.
    pub(super) fn invalid(
        param: impl Into<String>,
        code: &'static str,
        message: impl Into<String>,
    ) -> ApiError {
        ApiError {
            param: Some(param.into()),
            ..ApiError::plain(StatusCode::BAD_REQUEST, code, message)
        }
    }

    /// A client's error that is about no one parameter.
    pub(super) fn plain(
        status: StatusCode,
        code: &'static str,
        message: impl Into<String>,
    ) -> ApiError {
        ApiError {
            status,
            kind: match status {
                StatusCode::UNAUTHORIZED => "authentication_error",
                StatusCode::FORBIDDEN => "permission_error",
                status if status.is_server_error() => "server_error",
                _ => "invalid_request_error",
            },
            message: message.into(),
            param: None,
            code: Some(code),
            retry_after: None,
        }
    }

    /// Not now; perhaps in a while.
    pub(super) fn busy(
        code: &'static str,
        message: impl Into<String>,
        retry_after: u64,
    ) -> ApiError {
        ApiError {
            retry_after: Some(retry_after),
            ..ApiError::plain(StatusCode::SERVICE_UNAVAILABLE, code, message)
        }
    }

    /// There is no model of that name here.
    pub(super) fn no_model(name: &str, here: &str) -> ApiError {
        ApiError {
            status: StatusCode::NOT_FOUND,
            ..ApiError::invalid(
                "model",
                "model_not_found",
                format!("The model '{name}' is not served here; '{here}' is."),
            )
        }
    }

    /// There is no such response, file or batch.
    pub(super) fn not_found(param: &str, what: &str, id: &str) -> ApiError {
        ApiError {
            status: StatusCode::NOT_FOUND,
            ..ApiError::invalid(
                param,
                "not_found",
                format!("No {what} with id '{id}' found."),
            )
        }
    }

    /// A parameter that is known and cannot be honoured.
    pub(super) fn unsupported(param: &str, why: &str) -> ApiError {
        ApiError::invalid(
            param,
            "unsupported_parameter",
            format!("Unsupported parameter: '{param}' {why}."),
        )
    }

    /// The JSON body.
    pub(super) fn body(&self) -> Value {
        json!({ "error": {
            "message": self.message,
            "type": self.kind,
            "param": self.param,
            "code": self.code,
        }})
    }
}

impl From<Failure> for ApiError {
    fn from(failure: Failure) -> ApiError {
        match failure {
            Failure::Refused {
                param,
                code,
                message,
            } => ApiError {
                param,
                ..ApiError::plain(StatusCode::BAD_REQUEST, code, message)
            },
            Failure::Unavailable { message } => ApiError::busy("weights_unavailable", message, 60),
            Failure::Broken { message } => {
                ApiError::plain(StatusCode::INTERNAL_SERVER_ERROR, "internal_error", message)
            }
        }
    }
}

impl From<TextError> for ApiError {
    fn from(error: TextError) -> ApiError {
        ApiError::from(Failure::from(error))
    }
}

impl From<TextError> for Failure {
    fn from(error: TextError) -> Failure {
        let message = error.to_string();
        match error {
            TextError::Invalid { param, .. } => Failure::Refused {
                param: Some(param),
                code: "invalid_value",
                message,
            },
            TextError::NoChatMarkup { .. } => Failure::Refused {
                param: Some("messages".to_owned()),
                code: "no_chat",
                message: "this model's tokenizer has no chat markup; use /v1/completions"
                    .to_owned(),
            },
            TextError::Damaged { .. } => Failure::Broken { message },
        }
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let mut reply = (self.status, Json(self.body())).into_response();
        let headers = reply.headers_mut();
        if let Some(seconds) = self.retry_after {
            headers.insert(header::RETRY_AFTER, seconds.into());
        }
        if self.status == StatusCode::UNAUTHORIZED {
            headers.insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        reply
    }
}
