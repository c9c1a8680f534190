mod batches;
mod files;
mod hours;
mod replies;
mod requests;
mod responses;
mod safety;
pub(super) mod scripted;
