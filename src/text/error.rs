//! What can go wrong between words and tokens.

/// Why text could not become tokens, or a conversation not a prompt.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TextError {
    /// A tokenizer file is not what it should be: fetch it again, or use another revision.
    #[error("{file}{}: {what}", at_line(*line))]
    Damaged {
        /// The file, as it is called in the repository.
        file: &'static str,
        /// The line at fault, counted from 1; 0 where it is not about one line.
        line: usize,
        /// What is wrong with it.
        what: String,
    },
    /// The model's tokenizer has no K3 chat markup: a chat cannot be written in it.
    #[error(
        "this model's tokenizer has no `{missing}` token, so a chat cannot be written for it; \
         give the prompt as it stands with --raw, or as token ids with --ids"
    )]
    NoChatMarkup {
        /// The first special token that was looked for in vain.
        missing: &'static str,
    },
    /// The request holds something that has no place in a prompt: the caller must change it.
    #[error("{param}: {what}")]
    Invalid {
        /// Path of the parameter at fault, such as `messages[2].role`.
        param: String,
        /// What is wrong with it, and what would be right.
        what: String,
    },
}

impl TextError {
    pub(super) fn invalid(param: impl Into<String>, what: impl Into<String>) -> Self {
        TextError::Invalid {
            param: param.into(),
            what: what.into(),
        }
    }

    /// The same error, seen from one level further out: `role` becomes `messages[2].role`.
    pub(super) fn inside(self, outer: &str) -> Self {
        match self {
            TextError::Invalid { param, what } => TextError::Invalid {
                param: format!("{outer}.{param}"),
                what,
            },
            other => other,
        }
    }

    /// What to try next, where there is something.
    pub fn hint(&self) -> Option<&'static str> {
        match self {
            TextError::Damaged { .. } => Some(
                "fetch the file again (remove it from the model's meta folder), or choose another --revision",
            ),
            TextError::NoChatMarkup { .. } => Some("use --raw or --ids"),
            TextError::Invalid { .. } => None,
        }
    }
}

fn at_line(line: usize) -> String {
    if line == 0 {
        String::new()
    } else {
        format!(" line {line}")
    }
}
