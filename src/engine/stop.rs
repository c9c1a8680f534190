//! Ending an answer before a stop text, wherever token edges fall.

/// Passes text through until one of its stop texts is complete, holding back only what may be the
/// beginning of one.
#[derive(Clone, Debug, Default)]
pub(super) struct StopTexts {
    stops: Vec<String>,
    held: String,
    found: bool,
}

impl StopTexts {
    /// Empty stop texts are ignored: they would end every answer at once.
    pub(super) fn new(stops: &[String]) -> Self {
        StopTexts {
            stops: stops.iter().filter(|s| !s.is_empty()).cloned().collect(),
            ..StopTexts::default()
        }
    }

    /// Whether a stop text came up; nothing passes after it.
    pub(super) fn found(&self) -> bool {
        self.found
    }

    /// Adds text and returns what may be shown now.
    pub(super) fn push(&mut self, text: &str) -> String {
        if self.found {
            return String::new();
        }
        if self.stops.is_empty() {
            return text.to_owned();
        }
        self.held.push_str(text);
        if let Some(at) = self
            .stops
            .iter()
            .filter_map(|s| self.held.find(s.as_str()))
            .min()
        {
            self.found = true;
            let shown = self.held[..at].to_owned();
            self.held.clear();
            return shown;
        }
        let keep = (0..self.held.len())
            .filter(|&at| self.held.is_char_boundary(at))
            .find(|&at| self.stops.iter().any(|s| s.starts_with(&self.held[at..])))
            .unwrap_or(self.held.len());
        let rest = self.held.split_off(keep);
        std::mem::replace(&mut self.held, rest)
    }

    /// What was held back when the text ended without a stop text.
    pub(super) fn finish(&mut self) -> String {
        std::mem::take(&mut self.held)
    }
}
