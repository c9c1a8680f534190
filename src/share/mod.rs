//! A model's bytes served to other machines, in the hub's own URL forms.
