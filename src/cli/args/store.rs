//! Where experts are kept, how many, and which go first.

use std::path::PathBuf;

use clap::Args;

use super::values::budget;
use crate::store::Budget;
use crate::store::Policy;
use crate::terms::Bytes;

/// Where things are kept, and how much of them.
#[derive(Args, Clone, Debug)]
pub(crate) struct StoreArgs {
    /// The store's folder [default: `DELTAFIN_HOME`, else the platform's data folder]
    #[arg(long, help_heading = "Store")]
    pub home: Option<PathBuf>,
    /// Disk for experts: a size such as 200GB, or `unlimited` [default: as last set, else the
    /// smaller of 200GB and free space less the reserve]
    #[arg(long, value_parser = budget, help_heading = "Store")]
    pub cache: Option<Budget>,
    /// Free disk that experts never touch [default: the larger of 10GB and 5 %]
    #[arg(long, help_heading = "Store")]
    pub reserve: Option<Bytes>,
    /// Which expert goes when the cache is full: the one used longest ago, or the one used least
    /// often lately [default: as last set, else lru]
    #[arg(long, value_enum, help_heading = "Store")]
    pub policy: Option<PolicyArg>,
}

/// Which expert goes when there is no room.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum PolicyArg {
    Lru,
    Lfu,
}

impl From<PolicyArg> for Policy {
    fn from(arg: PolicyArg) -> Policy {
        match arg {
            PolicyArg::Lru => Policy::Lru,
            PolicyArg::Lfu => Policy::Lfu,
        }
    }
}
