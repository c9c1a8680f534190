//! A request's JSON object, read parameter by parameter, so that what nobody read can be refused by
//! name: a field that is silently ignored costs its sender hours.

use serde_json::Map;
use serde_json::Value;

use super::error::ApiError;

/// The parameters not read yet.
#[derive(Debug)]
pub(super) struct Params {
    rest: Map<String, Value>,
}

impl Params {
    /// # Errors
    ///
    /// 400 where the body is not JSON, or no object.
    pub(super) fn parse(body: &[u8]) -> Result<Params, ApiError> {
        let wrong = |message: String| {
            ApiError::plain(axum::http::StatusCode::BAD_REQUEST, "invalid_json", message)
        };
        match serde_json::from_slice(body) {
            Ok(Value::Object(rest)) => Ok(Params { rest }),
            Ok(_) => Err(wrong("The body must be a JSON object.".to_owned())),
            Err(error) => Err(wrong(format!("The body is not valid JSON: {error}."))),
        }
    }

    /// A parameter that is there and not null.
    pub(super) fn take(&mut self, name: &str) -> Option<Value> {
        self.rest.shift_remove(name).filter(|v| !v.is_null())
    }

    /// Whether a parameter is there, be it null.
    pub(super) fn has(&self, name: &str) -> bool {
        self.rest.contains_key(name)
    }

    /// A parameter, left to be read.
    pub(super) fn peek(&self, name: &str) -> Option<&Value> {
        self.rest.get(name).filter(|v| !v.is_null())
    }

    /// # Errors
    ///
    /// 400 where it is there and no boolean.
    pub(super) fn boolean(&mut self, name: &str) -> Result<Option<bool>, ApiError> {
        self.typed(name, "a boolean", |v| v.as_bool())
    }

    /// # Errors
    ///
    /// 400 where it is there and no string.
    pub(super) fn string(&mut self, name: &str) -> Result<Option<String>, ApiError> {
        self.typed(name, "a string", |v| v.as_str().map(str::to_owned))
    }

    /// # Errors
    ///
    /// 400 where it is there and no whole number from `least` to `most`.
    pub(super) fn whole(
        &mut self,
        name: &str,
        least: u64,
        most: u64,
    ) -> Result<Option<u64>, ApiError> {
        let expected = match most {
            u64::MAX => format!("a whole number of at least {least}"),
            most => format!("a whole number from {least} to {most}"),
        };
        self.typed(name, &expected, |v| {
            v.as_u64().filter(|n| (least..=most).contains(n))
        })
    }

    /// # Errors
    ///
    /// 400 where it is there and no number from `least` to `most`.
    pub(super) fn number(
        &mut self,
        name: &str,
        least: f32,
        most: f32,
    ) -> Result<Option<f32>, ApiError> {
        self.typed(name, &format!("a number from {least} to {most}"), |v| {
            #[expect(clippy::cast_possible_truncation, reason = "the arithmetic is in f32")]
            let number = v.as_f64()? as f32;
            (least..=most).contains(&number).then_some(number)
        })
    }

    fn typed<T>(
        &mut self,
        name: &str,
        expected: &str,
        read: impl FnOnce(&Value) -> Option<T>,
    ) -> Result<Option<T>, ApiError> {
        self.take(name)
            .map(|value| {
                read(&value).ok_or_else(|| wrong_value(name, &format!("must be {expected}")))
            })
            .transpose()
    }

    /// Passes over a parameter that changes nothing here, whatever its value.
    pub(super) fn pass(&mut self, names: &[&str]) {
        for name in names {
            self.rest.shift_remove(*name);
        }
    }

    /// Refuses a parameter that cannot be honoured, unless it has a value that asks for nothing.
    ///
    /// # Errors
    ///
    /// 400, naming it.
    pub(super) fn refuse(
        &mut self,
        name: &str,
        harmless: &[Value],
        why: &str,
    ) -> Result<(), ApiError> {
        match self.take(name) {
            Some(value) if !harmless.contains(&value) => Err(ApiError::unsupported(name, why)),
            _ => Ok(()),
        }
    }

    /// To be called when everything known was read.
    ///
    /// # Errors
    ///
    /// 400, naming what nobody read. A null asks for nothing and passes.
    pub(super) fn end(self) -> Result<(), ApiError> {
        match self.rest.into_iter().find(|(_, value)| !value.is_null()) {
            None => Ok(()),
            Some((name, _)) => Err(ApiError::invalid(
                &name,
                "unknown_parameter",
                format!("Unknown parameter: '{name}'."),
            )),
        }
    }
}

/// 400: the parameter is known, its value is not acceptable.
pub(super) fn wrong_value(name: &str, what: &str) -> ApiError {
    ApiError::invalid(
        name,
        "invalid_value",
        format!("Invalid value for '{name}': {what}."),
    )
}
